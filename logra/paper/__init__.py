"""The notebook suite: what its figures, tables and claims are made with, and the runner."""

import sys

# An optional grammar of IRIs, which jsonschema, and with it nbformat, takes one to five seconds to build at import and no notebook's schema asks for.
sys.modules.setdefault("rfc3987_syntax", None)
