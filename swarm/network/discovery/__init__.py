"""Finding a run and its peers: signed records, the directory that holds them, the manifest."""
