"""Which sequences run next, and how much of each: order, budget, admission. Pure decisions; the caller applies them."""
