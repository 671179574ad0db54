"""The operator's name; it has no kernel of its own to configure."""

OPERATOR = "all_to_all_bmm"
