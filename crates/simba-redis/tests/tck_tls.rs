//! The whole kit through TLS, verified in full, as the user with the fewest rights.

mod common;

simba_tck::suite!(common::Encrypted::shared());
