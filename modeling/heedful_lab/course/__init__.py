"""Views for the course: attention in numbers, neighbours of words, and gates of recurrent cells."""
