# placeholder, being written
