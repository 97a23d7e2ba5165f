"""The chat page: one document without external resources, joined from the files of `page/`."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = (  # parts of one module, in this order
    "elements.js",
    "markdown.js",
    "api.js",
    "storage.js",
    "documents.js",
    "conversation.js",
    "work.js",
    "view.js",
    "main.js",
)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _csp_hash(source: str) -> str:
    """Return the CSP hash of the page's script or style, so that browsers allow no other."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_STYLE = _read("style.css")
_SCRIPT = "\n".join(map(_read, _SCRIPTS))
PAGE = (
    _read("index.html")
    .replace("<style></style>", f"<style>{_STYLE}</style>")
    .replace('<script type="module"></script>', f'<script type="module">{_SCRIPT}</script>')
)
POLICY = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_csp_hash(_SCRIPT)}; style-src {_csp_hash(_STYLE)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
