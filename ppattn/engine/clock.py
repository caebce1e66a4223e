"""Measure how long the phases of a training step take."""

from __future__ import annotations

import time

PHASES = ("data", "forward", "wait", "backward", "optimizer")
WARMUP = 5  # first steps of a process, which no speed is measured on


class Clock:
    """Adds up the time of the steps of an epoch, by phase; the sums live in the run's progress.

    A GPU computes while the program goes on: there, phases are measured only on steps that wait for it anyway.
    """

    def __init__(self, gpu: bool):
        self.gpu, self.steps = gpu, 0

    def start(self, times: dict, timed: bool) -> None:
        """Begin a step; `timed` allows to wait for the device at the end of every phase."""
        self.times, self.timed = times, timed or not self.gpu
        self.began = time.perf_counter()  # waiting for the work of earlier steps counts, too
        self.last = self._now()

    def lap(self, phase: str) -> None:
        """The time since the last call went into `phase`."""
        if self.timed:
            now = self._now()
            if self.steps >= WARMUP:
                self._add(phase, now - self.last)
            self.last = now

    def stop(self, images: int) -> None:
        """End a step over `images` images."""
        seconds = time.perf_counter() - self.began
        self._add("seconds", seconds)
        self._add("images", images)
        if self.steps >= WARMUP:
            self._add("warm_seconds", seconds)
            self._add("warm_images", images)
            self._add("timed_steps", int(self.timed))
        self.steps += 1

    @staticmethod
    def row(times: dict) -> dict:
        """Columns for metrics.csv: seconds of training, images per second, milliseconds per step and phase."""
        kind = "warm_" if times.get("warm_seconds") else ""
        seconds = times.get(f"{kind}seconds", 0.0)
        row = {
            "seconds": times.get("seconds", 0.0),
            "images_per_second": times.get(f"{kind}images", 0) / seconds if seconds else None,
        }
        steps = times.get("timed_steps", 0)
        return row | {f"{phase}_ms": 1000 * times.get(phase, 0.0) / steps if steps else None for phase in PHASES}

    def _now(self) -> float:
        if self.gpu and self.timed:
            import paddle

            paddle.device.synchronize()
        return time.perf_counter()

    def _add(self, key: str, value: float) -> None:
        self.times[key] = self.times.get(key, 0) + value
