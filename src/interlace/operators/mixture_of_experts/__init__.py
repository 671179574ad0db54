"""``mixture_of_experts``: see ``README.md``."""
