"""Signals that ask a training to stop."""

from __future__ import annotations

import signal
import threading

from ppattn.errors import Preempted

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Remembers the `name` of a SIGTERM, SIGINT or SIGHUP that comes inside its block instead of terminating.

    A second Ctrl-C interrupts at once. SIGHUP (the terminal is closed) stays ignored where `nohup` has made it so. The
    launcher of several processes sends SIGTERM to all when the first has left, so where they are `launched` those that
    leave after a stop ignore it from then on and keep their exit code.
    """

    def __init__(self, launched: bool):
        self.name, self.launched = "", launched
        self.before: dict = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            numbers = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if kind is Preempted and self.launched else handler)

    def _note(self, number, frame) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
