"""Tenants: who may call, what they may use, and what keeps them apart."""
