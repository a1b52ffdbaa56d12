"""What operators decide and want to know, whoever asks and by whatever protocol: who may call and what each may use
(`tenants`), what was handed to whom (`usage`), who did what (`audit`, `signing`), what was promised and kept (`slo`),
what engines and workers do (`observe`, `workers`).

It keeps and counts; it knows no HTTP. What a call passes and what paths show it is in `server`.
"""
