"""What operators decide and want to know, whoever asks and by whatever protocol: who may call and what each may use
(`tenants`), what was handed to whom (`usage`), who did what (`audit`, `signing`), what was promised and kept (`slo`),
which models there are (`models`), what engines and workers do (`observe`, `workers`).

It keeps and counts; what a call passes on its way, and the paths that show what is here, are in `server`.
"""
