"""The versions this package bends and is tested with."""

from importlib.metadata import PackageNotFoundError, version

TESTED_TRL = "1.16"


def require_tested_trl() -> None:
    """Fail in one line on a TRL whose internals this package has not been tested with.

    Raises:
        ImportError: TRL is absent or of another minor version.
    """
    remedy = f"install it with: pip install 'trl>={TESTED_TRL},<{_next_minor(TESTED_TRL)}'"
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise ImportError(f"grpo_ext needs TRL {TESTED_TRL} and none is installed; {remedy}") from None
    if installed.split(".")[:2] != TESTED_TRL.split("."):
        raise ImportError(f"grpo_ext is tested with TRL {TESTED_TRL} and found TRL {installed}; {remedy}")


def _next_minor(minor: str) -> str:
    major, number = minor.split(".")
    return f"{major}.{int(number) + 1}"
