"""What runs in the jail's own process: an interpreter without site-packages, so the standard library alone.

Nothing here imports gruppo by name: the folder is put on the path of a bare interpreter; see ``rewards/jail.py``.
"""
