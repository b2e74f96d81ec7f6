DELETE FROM {waiter} w WHERE w.session = $2 AND w.mutex = ANY($1::text[])
