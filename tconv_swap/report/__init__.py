"""Reports a swap to people and programs: a JSON document, and the forms that are made from it."""

from tconv_swap.report.document import SCHEMA_VERSION, Facts, json_schema, outcome, to_json_dict
from tconv_swap.report.terminal import make_console, print_report

__all__ = [
    "SCHEMA_VERSION",
    "Facts",
    "json_schema",
    "make_console",
    "outcome",
    "print_report",
    "to_json_dict",
]
