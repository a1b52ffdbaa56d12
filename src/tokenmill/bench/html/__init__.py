"""Results as pages that people look at, and as CSV: `tokenmill bench report`."""
