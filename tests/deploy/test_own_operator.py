"""A user's attention exports with operators that no attention here uses."""

import numpy as np
import paddle
import pytest
from paddle import nn

import ppattn
from ppattn.attention import ATTENTIONS, Attention, AttentionSpec, Context
from ppattn.deploy.folder import PROGRAM
from ppattn.ops import merge_heads, split_heads

pytestmark = pytest.mark.slow


class RunningMean(Attention):
    """Y_i = mean of V_j over j <= i, times asinh(q_i)."""

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.qv = nn.Linear(spec.dim, 2 * spec.dim)

    def project(self, x, context: Context):
        return split_heads(self.qv(x), self.num_heads, 2)

    def attend(self, parts, context: Context):
        q, v = parts
        count = paddle.arange(1, v.shape[2] + 1, dtype=v.dtype).unsqueeze(1)
        return merge_heads(paddle.asinh(q) * paddle.cumsum(v, axis=2) / count)

    def finish(self, y, parts):
        return y


def test_an_attention_with_operators_of_its_own_exports(tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTIONS._entries, "running_mean", RunningMean)
    model = ppattn.create_model("deit_nano", attention="running_mean", depth=2, num_classes=3, img_size=(24, 40))
    report = ppattn.export(model, tmp_path / "model", classes=["ant", "bee", "cow"])
    assert report["engine"] == "stock" and max(report["differences"].values()) < 1e-5
    program = (tmp_path / "model" / PROGRAM).read_text()
    assert "asinh" in program and "cumsum" in program
    picture = np.random.default_rng(0).integers(0, 256, (31, 47, 3)).astype(np.uint8)
    predictor = ppattn.Predictor(tmp_path / "model")
    scores = predictor.run(predictor.preprocess.batch([picture]))
    model.eval()
    expected = paddle.nn.functional.softmax(model(paddle.to_tensor(predictor.preprocess.batch([picture]))))
    assert np.allclose(scores, expected.numpy(), atol=1e-5)
