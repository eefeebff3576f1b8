"""Lightning strategies and their precision plugins: lifecycle only."""
