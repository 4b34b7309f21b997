"""Jobs from acceptance to completion: captures, sweeps, settlement, watching; workers."""
