//! The members of a cluster of etcd.

use std::net::SocketAddr;

use anyhow::Result;

use super::query;
use crate::kinds::etcd::{health, membership};
use crate::setup::{Setup, free_address};

/// Returns this many members of one cluster. All must get the same peer addresses, which identify them.
pub(super) fn members(count: usize) -> Result<Vec<Setup>> {
    let peers: Vec<SocketAddr> = (0..count).map(|_| free_address()).collect::<Result<_>>()?;
    let member = |own| membership(own, &peers).into_iter().fold(Setup::etcd(), Setup::with_setting);
    Ok((0..count).map(member).collect())
}

pub(super) fn leads(address: SocketAddr) -> Result<bool> {
    let metrics = query(health(address), "GET /metrics HTTP/1.0\r\n\r\n")?;
    Ok(metrics.contains("\netcd_server_is_leader 1\n"))
}
