"""The workers of a front end as its operator sees and moves them: a roster, and the paths under /admin/workers."""
