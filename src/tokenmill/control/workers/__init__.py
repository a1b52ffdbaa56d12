"""The workers of a front end as its operator sees and moves them."""
