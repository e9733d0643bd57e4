"""Commands that no pipeline needs: batches, models, tuning, a live table, problem reports."""
