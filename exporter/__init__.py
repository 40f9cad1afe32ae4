"""From a checkpoint to verified artifacts; `api` shows the whole way."""
