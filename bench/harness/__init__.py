"""What tools/bench is made of: programs are run (programs), what they measure becomes rows (suites), rows become a report (report)."""
