"""Raise the error for an unknown name, with the nearest known one."""

import difflib


def nearest(name, known, least_share: float = 0.52) -> str | None:
    """Return the name in `known` that looks most like `name`, or None if none does.

    Of two names with digits, at least half of the digits must be alike: 'sm42' does not suggest 'sm121'.

    Args:
        least_share: of equal letters. With the default, 'sm90' suggests 'nvidia:sm90', whose share is 0.53, and
            'relu' does not suggest 'silu', whose share is 0.5. Long lists need more.
    """
    for near in difflib.get_close_matches(str(name), known, n=1, cutoff=least_share):
        digits = ["".join(filter(str.isdigit, text)) for text in (str(name), near)]
        if not all(digits) or difflib.SequenceMatcher(None, *digits).ratio() >= 0.5:
            return near
    return None


def check_known(kind: str, name, known, title: str = "", others=()) -> None:
    """Raise a ValueError with the nearest of `known` unless `name` is among them.

    "unknown flag 'rms_nrom'; did you mean 'rms_norm'? Flags: rope, rms_norm, ..."

    Args:
        kind: what `name` should be, in the singular, such as "flag" or "loss_type".
        known: names, in the order in which the error lists them.
        title: of that list; by default the plural of `kind`.
        others: further names that the caller may have meant, which the error does not list.
    """
    if isinstance(name, str) and name in known:
        return
    near = nearest(name, [*known, *others])
    suggestion = f"; did you mean {near!r}?" if near else "."
    title = title or f"{kind.replace('_', ' ').capitalize()}s"
    raise ValueError(f"unknown {kind} {name!r}{suggestion} {title}: {', '.join(known) or 'none'}")
