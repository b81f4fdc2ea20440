// Hover, zoom and keys.
