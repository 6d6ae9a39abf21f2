"""kv_connector_extra_config: what a user chooses."""

import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_bytes(text):
    """Bytes that a number, or text such as "100GiB", means."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", str(text).strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f'capacity: {text!r} was given; give bytes, or a size such as "100GiB"')
    return int(float(match[1]) * UNITS[match[2]])
