"""The OpenAPI document, made by tests/unit/make_api_doc.py from the tables of docs/api.md, and a page of it."""
