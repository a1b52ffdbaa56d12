"""Who runs next and how much of it: order, budget, admission. Pure decisions; the caller books them."""
