"""A finished run looked at: student against teacher (`evaluation`), and the page that shows it (`report`)."""
