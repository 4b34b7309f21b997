"""Jobs from acceptance to completion: captures, settlement, watching; workers."""
