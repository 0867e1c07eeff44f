"""The page of a run: live over HTTP (``gruppo view``), and as one file (``gruppo report``)."""
