"""From an alarm to what is done to a row: guards are run, ladders climbed, rows held and put back, snapshots kept."""
