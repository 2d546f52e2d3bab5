"""Writes the profile's JSON schema: ``python -m calibrate.writing.schema docs/reference/profile.schema.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from morph.contract.profile import Profile


def schema_text() -> str:
    """Return the schema as it is published."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Profile.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
