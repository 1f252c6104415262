"""Users' reward functions, checked: a bad answer is one error with the function's name, or a row without a reward."""

import copy
import functools
import logging
import math
import numbers
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

logger = logging.getLogger(__name__)


def checked_reward(function: Callable, name: str) -> Callable:
    """Wrap a reward function so that TRL only ever sees one finite number, or `None`, per completion.

    `None` and NaN are a response without a reward: it is left out of its group's statistics and gets advantage 0.

    Args:
        function: sync or async, as TRL calls it; a reward model (`nn.Module`) comes back unchanged.
        name: as it appears in the logs.

    Returns:
        A function of the same kind. It raises `RuntimeError` if the function raises, `ValueError` if what it returns
        is not a sequence with one number (or `None`, NaN) per completion, or holds an infinity; each with the name.
    """
    if isinstance(function, nn.Module):
        return function
    warned = False

    def check(rewards, expected: int) -> list[float | None]:
        nonlocal warned
        checked = [_as_reward(value, row, name) for row, value in enumerate(_as_sequence(rewards, name))]
        if len(checked) != expected:
            raise ValueError(
                f"reward function {name!r} returned {len(checked)} rewards for {expected} completions; it must return "
                f"one per completion"
            )
        missing = sum(value is None for value in checked)
        if missing and not warned:
            warned = True
            logger.warning(
                "reward function %r gave no reward (None or NaN) for %d of %d completions; such rows are left out of "
                "their group and, if no other function scores them, get advantage 0 (said once)",
                name,
                missing,
                expected,
            )
        return checked

    def own_lists(arguments: dict) -> dict:
        """What one function does to its lists must not reach the next."""
        return {key: list(value) if isinstance(value, list) else value for key, value in arguments.items()}

    def failed(error: Exception) -> RuntimeError:
        return RuntimeError(f"reward function {name!r} raised {type(error).__name__}: {error}")

    if is_async_callable(function):

        @functools.wraps(function)
        async def wrapper(*, completions, **kwargs):
            try:
                rewards = await function(completions=copy.deepcopy(completions), **own_lists(kwargs))
            except Exception as error:
                raise failed(error) from error
            return check(rewards, len(completions))
    else:

        @functools.wraps(function)
        def wrapper(*, completions, **kwargs):
            try:
                rewards = function(completions=copy.deepcopy(completions), **own_lists(kwargs))
            except Exception as error:
                raise failed(error) from error
            return check(rewards, len(completions))

    return wrapper


def _as_sequence(rewards, name: str) -> Sequence:
    if isinstance(rewards, Tensor):
        rewards = rewards.detach().cpu().tolist()
    elif hasattr(rewards, "tolist"):  # numpy
        rewards = rewards.tolist()
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ValueError(
            f"reward function {name!r} returned a {type(rewards).__name__}; it must return a list with one number (or "
            f"None) per completion"
        )
    return rewards


def _as_reward(value, row: int, name: str) -> float | None:
    if value is None:
        return None
    if (hasattr(value, "item") and getattr(value, "size", None) in (1, ())) or isinstance(value, Tensor):
        value = value.item() if getattr(value, "numel", lambda: 1)() == 1 else value
    if not isinstance(value, numbers.Real):
        raise ValueError(
            f"reward function {name!r} returned {value!r} ({type(value).__name__}) for completion {row}; it must "
            f"return a number, or None for a completion that it cannot score"
        )
    try:
        value = float(value)
    except OverflowError:  # an int beyond the floats
        value = math.inf
    if math.isinf(value):
        raise ValueError(
            f"reward function {name!r} returned {value} for completion {row}; a reward must be finite, or None for a "
            f"completion that it cannot score"
        )
    return None if math.isnan(value) else value
