module wandistill.test/pause

go 1.23
