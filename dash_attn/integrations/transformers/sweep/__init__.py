"""Every architecture of the installed Transformers, built small: right, or refused with a clear message."""
