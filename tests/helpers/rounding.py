"""How far a result may be from the exact one: a bound that follows from the function, not from one processor's results.

Every step of a computation rounds: it is off by up to one UNIT of what it gives. How much such an error matters shows
in the exact function when all its inputs are moved by a UNIT, up or down at random; the result itself is rounded, too.
The errors of a sum are independent: they add up like the square root of the number of its terms.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
STEPS = 16.0
NOTICED = 1e-4  # an error of this part of the largest number is noticed in float32, or the case is too ill-conditioned

Move = Callable[[np.ndarray], np.ndarray]


def exact_and_allowed(
    reference: Callable[[Move], Sequence],
    terms: int,
    steps: float = STEPS,
    dtype: str = "float32",
    noticed: float = NOTICED,
) -> list:
    """The exact outputs, each with the largest error that a computation in `dtype` may make; None stays None.

    Args:
        reference: computes the outputs in float64 and passes all its inputs through the function that it is given.
        terms: number of terms of the longest sum.
        steps: one after the other, how many of the size of the inputs or of the result round.
    """
    rng = np.random.default_rng(0)
    step = UNIT["float32"]  # far above the rounding of the reference, far below what would bend it

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1.0 + step * rng.choice([-1.0, 1.0], np.shape(x)))

    exact = reference(lambda x: x)
    others = [reference(moved) for _ in range(3)]
    found: list = []
    for i, y in enumerate(exact):
        if y is None:
            found.append(None)
            continue
        largest = np.abs(y).max()
        spread = max(np.abs(other[i] - y).max() for other in others)
        allowed = (steps + terms**0.5) * (spread / step + largest) * UNIT[dtype]
        assert allowed <= noticed * largest, f"output {i} is too ill-conditioned for a test: {allowed / largest:.0e}"
        found.append((y, allowed))
    return found


def check_rounding(found: Sequence, reference: Callable[[Move], Sequence], terms: int, **options) -> None:
    """Compare outputs with the exact ones, by the largest difference of each."""
    check_within(found, exact_and_allowed(reference, terms, **options))


def check_within(found: Sequence, bounds: Sequence) -> None:
    """Compare outputs with the result of `exact_and_allowed`."""
    for i, (a, wanted) in enumerate(zip(found, bounds, strict=True)):
        assert (a is None) == (wanted is None), f"output {i}"
        if wanted is not None:
            exact, allowed = wanted
            assert a.shape == exact.shape
            error = np.abs(a - exact).max()
            assert error <= allowed, f"output {i}: {error:.1e}, and {allowed:.1e} is allowed"


def exact_answers(model, images: np.ndarray) -> Callable[[Move], list[np.ndarray]]:
    """The reference for the logits of a model in eval mode."""
    import paddle

    def exact(move: Move) -> list[np.ndarray]:
        paddle.set_default_dtype("float64")
        try:
            with paddle.no_grad():
                return [in_float64(model, move)(paddle.to_tensor(move(images.astype("float64")))).numpy()]
        finally:
            paddle.set_default_dtype("float32")

    return exact


def in_float64(layer, move: Move):
    """A copy of a layer in float64 whose parameters have gone through `move`."""
    twin = copy.deepcopy(layer)
    twin._to_impl(dtype="float64", floating_only=True)  # indices stay integers
    for parameter in twin.parameters():
        parameter.set_value(move(parameter.numpy()))
    return twin
