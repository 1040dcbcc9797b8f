"""Places where other libraries let an attention be plugged in."""
