"""The chat page: one file without external resources."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _csp_hash(tag: str) -> str:
    """Return the CSP hash of the page's script or style, so that browsers allow no other."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    assert match is not None
    digest = hashlib.sha256(match[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


POLICY = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_csp_hash('script')}; style-src {_csp_hash('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
