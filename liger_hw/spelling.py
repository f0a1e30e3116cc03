"""Raise the error for an unknown name, with the nearest known one."""

import difflib

ELSEWHERE = {  # option that other functions have: what to do where a function lacks it
    "token_weights": "cross entropy alone weighs tokens (fused_linear_cross_entropy, or a patched model's call); "
    "policy_loss takes advantages by token, and token_loss a formula with rows",
    "counted_rows": "only losses of a head that skip rows by a label have it; give this one the rows that count",
    "softcap": "a loss of logits leaves them as they are; a function for logits_loss scales them itself",
}
ELSEWHERE["logit_scale"] = ELSEWHERE["softcap"]


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


def suggestion(name, known) -> str:
    """Return the end of an unknown name's error: advice, the nearest name, or nothing."""
    if isinstance(name, str) and name in ELSEWHERE:
        return f"; {ELSEWHERE[name]}"
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


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
    end = suggestion(name, [*known, *others])
    end = end if end.endswith("?") else f"{end}."
    title = title or f"{kind.replace('_', ' ').capitalize()}s"
    raise ValueError(f"unknown {kind} {name!r}{end} {title}: {', '.join(known) or 'none'}")
