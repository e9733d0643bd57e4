"""Commands that no pipeline needs: batches, models on this machine, tuning, a live table, facts."""
