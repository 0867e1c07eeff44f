"""What a run shows and leaves behind: console, files, plots and the closing report."""
