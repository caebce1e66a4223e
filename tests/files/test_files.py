"""Files are written completely or not at all, and never replace what is no regular file."""

import errno
import io
import os
import pickle
import stat
import struct
import threading
import tracemalloc
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest

from ppattn import weights
from ppattn.errors import UserError
from ppattn.files import atomic
from ppattn.files.atomic import atomic_folder, exchange, replacing, write_rows, write_text
from ppattn.files.cache import locked
from ppattn.files.pickles import ArrayUnpickler, read_pickle


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_replaced_in_one_step_or_stays(tmp_path):
    (path := tmp_path / ("猫" * 85)).write_text("old")  # 255 bytes, the most that a name has
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == {path.name}
    write_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == {path.name}


def test_a_table_with_other_than_ascii_has_the_mark_for_excel(tmp_path):
    for name, mark in (("cat", b""), ("猫", b"\xef\xbb\xbf")):
        write_rows(tmp_path / "x.csv", [["class"], [name]])
        assert (tmp_path / "x.csv").read_bytes().split() == [mark + b"class", name.encode()]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("old")
    for target in ("file", "other"):  # which is not there yet
        (tmp_path / "link").symlink_to(f"real/{target}")
        write_text(tmp_path / "link", "new")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / target).read_text() == "new"
        (tmp_path / "link").unlink()


@pytest.mark.parametrize("through_a_descriptor", [False, True])
def test_a_pipe_is_written_to(tmp_path, through_a_descriptor):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    if through_a_descriptor:  # as in `--csv >(gzip > x.gz)`
        writer = os.open(path, os.O_WRONLY)
        write_text(Path(f"/dev/fd/{writer}"), "text")
        os.close(writer)
    else:
        write_text(path, "text")
    reader.join(10)
    assert read == ["text"] and stat.S_ISFIFO(path.stat().st_mode) and names(tmp_path) == {"pipe"}


def test_permissions_are_those_of_the_umask_or_of_the_file_before(tmp_path):
    before = os.umask(0o026)
    try:
        weights.save(tmp_path / "new", {"a": np.ones(3, "float32")}, {})  # which safetensors makes 0o600
        (tmp_path / "old").write_text("x")
        (tmp_path / "old").chmod(0o604)
        write_text(tmp_path / "old", "y")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")] == [0o640, 0o604]


def test_a_link_under_the_name_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    (victim := tmp_path / "victim").write_text("precious")
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda count: "guessed")
    (tmp_path / ".out.csv.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "out.csv", "text")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_folders_are_exchanged(tmp_path, monkeypatch, in_one_step):
    for name in ("new", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not in_one_step:  # another C library, or a file system that cannot
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda name: object())
    exchange(tmp_path / "new", tmp_path / "folder")
    assert names(tmp_path / "folder") == {"new"} and names(tmp_path / ("new" if in_one_step else "old")) == {"folder"}


def test_a_folder_appears_complete_and_only_instead_of_its_own_kind(tmp_path):
    folder = tmp_path / "export"
    for text in ("first", "second"):
        with atomic_folder(folder, {"a"}, "export") as work:
            (work / "a").write_text(text)
            assert not folder.exists() if text == "first" else (folder / "a").read_text() == "first"
    assert (folder / "a").read_text() == "second" and names(tmp_path) == {"export"}
    (folder / "mine").touch()
    with pytest.raises(UserError, match="holds something that is no export"), atomic_folder(folder, {"a"}, "export"):
        pass


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x80\x05" + kind + struct.pack("<Q", 3 << 30) for kind in (b"\x96", b"\x8e", b"\x8d")),  # bytes, text
        b"\x80\x04N\x72" + struct.pack("<I", 1 << 28) + b".",  # a memo of 268 million entries
    ],
)
def test_a_few_bytes_cannot_ask_for_memory(tmp_path, data):
    (tmp_path / "x.pdparams").write_bytes(data)
    tracemalloc.start()
    with pytest.raises((ValueError, EOFError, pickle.UnpicklingError)):
        read_pickle(tmp_path / "x.pdparams")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_arrays_and_settings_are_read(tmp_path):
    tree = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": [1.5, "text", {2, 3}], "c": np.float32(4.5)}
    for protocol in (2, 4):  # in protocol 5 numpy uses a function that no checkpoint needs
        found = ArrayUnpickler(io.BytesIO(pickle.dumps(tree, protocol=protocol))).load()
        np.testing.assert_array_equal(found["a"], tree["a"])
        assert found["b"] == tree["b"] and found["c"] == 4.5


def test_who_waits_for_a_lock_says_so(tmp_path):
    def second() -> None:
        with locked(tmp_path / "cache"):
            pass

    waiting = threading.Thread(target=second)
    with locked(tmp_path / "cache"), redirect_stderr(io.StringIO()) as said:
        waiting.start()
        while not said.getvalue().endswith("\n"):
            waiting.join(0.01)
    waiting.join()
    assert said.getvalue() == f"waiting for another process that downloads or compiles into {tmp_path / 'cache'}\n"


def test_an_error_of_a_flush_names_the_file(tmp_path, monkeypatch):
    def broken(handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="it.json"), replacing(tmp_path / "it.json", sync=True):
        pass
    assert [*tmp_path.iterdir()] == []
