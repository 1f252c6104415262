"""Users' rollout functions, checked: what TRL would trip over later is one error that names the row."""

import functools
from collections.abc import Callable
from typing import Any


def checked_rollout(function: Callable[..., dict[str, Any]] | None) -> Callable[..., dict[str, Any]] | None:
    """Wrap a `rollout_func` so that what it returns fits together; `None` stays `None`.

    Raises (when called):
        ValueError: another number of rows than prompts, a row without tokens, or a mask of another length than its
            completion; names the field and the row.
    """
    if function is None:
        return None

    @functools.wraps(function)
    def wrapper(prompts, trainer):
        output = function(prompts, trainer)
        for name in ("prompt_ids", "completion_ids"):
            rows = output.get(name)
            if rows is None:
                continue  # TRL's own error lists the missing fields
            if len(rows) != len(prompts):
                raise ValueError(f"rollout_func returned {len(rows)} {name} for {len(prompts)} prompts; one each")
            for i, row in enumerate(rows):
                if not len(row):
                    raise ValueError(
                        f"rollout_func returned no tokens in {name}[{i}]; a row needs at least one, such as the end "
                        f"of sequence"
                    )
        for i, mask in enumerate(output.get("env_mask") or ()):
            if len(mask) != len(output["completion_ids"][i]):
                raise ValueError(
                    f"rollout_func returned env_mask[{i}] of length {len(mask)} for a completion of "
                    f"{len(output['completion_ids'][i])} tokens; one value per token"
                )
        return output

    return wrapper
