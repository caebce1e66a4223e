"""How far a result may be from the exact one: a bound that follows from the function, not from one processor's results.

Every step of a computation rounds: it is off by up to one UNIT of what it gives. How much such an error matters shows
in the exact function when all its inputs are moved by a UNIT, up or down at random; the result itself is rounded, too.
The errors of a sum are independent: they add up like the square root of the number of its terms.
"""

import pickle
from collections.abc import Callable, Sequence

import numpy as np

UNIT = 2.0**-24  # of float32: far above the rounding of the reference, far below what would bend it
STEPS = 16.0
NOTICED = 1e-4  # an error of this part of the largest number is noticed in float32, or the case is too ill-conditioned

Move = Callable[[np.ndarray], np.ndarray]


def exact_and_allowed(
    reference: Callable[[Move], Sequence], terms: int, steps: float = STEPS, noticed: float = NOTICED
) -> list:
    """The exact outputs, each with the largest error that a computation in float32 may make; None stays None.

    Args:
        reference: computes the outputs in float64 and passes all its inputs through the function that it is given.
        terms: number of terms of the longest sum.
        steps: one after the other, how many of the size of the inputs or of the result round."""
    rng = np.random.default_rng(0)

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1.0 + UNIT * rng.choice([-1.0, 1.0], np.shape(x)))

    def bounded(y, *others):
        if y is None:
            return None
        largest, spread = np.abs(y).max(), max(np.abs(other - y).max() for other in others)
        allowed = (steps + terms**0.5) * (spread + largest * UNIT)
        assert allowed <= noticed * largest, f"an output is too ill-conditioned for a test: {allowed / largest:.0e}"
        return y, allowed

    exact, others = reference(lambda x: x), [reference(moved) for _ in range(3)]
    return [bounded(*outputs) for outputs in zip(exact, *others, strict=True)]


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
    """A copy of a layer, made by a pickle, in float64 whose parameters have gone through `move`."""
    twin = pickle.loads(pickle.dumps(layer))
    twin._to_impl(dtype="float64", floating_only=True)  # indices stay integers
    for parameter in twin.parameters():
        parameter.set_value(move(parameter.numpy()))
    return twin


def relative_error(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Squared error of every array of a batch, divided by what is wanted, squared; the mean over images and arrays."""
    parts = [[(x.astype("float64") ** 2).reshape(len(x), -1).sum(1) for x in (a - b, b)]
             for a, b in zip(found, wanted, strict=True)]  # fmt: skip
    return float(np.mean([error / size for error, size in parts]))
