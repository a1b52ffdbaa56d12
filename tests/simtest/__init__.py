"""Seeded scenarios in which engines, stores and networks fail, with toys that check each answer."""
