"""Networks on disk: recognising a file, loading it without running what it is not trusted to run, saving it whole."""
