//! To the server that has a mutex, however many there are.

use std::sync::Arc;

use simba_core::Result;

use crate::cluster::Cluster;
use crate::config::{Address, Topology};
use crate::error;
use crate::node::{Context, Node, Source};
use crate::pipe::Pipe;
use crate::resp::Reply;
use crate::scripts::Invocation;
use crate::sentinel::Sentinel;
use crate::wire::Wire;

pub(crate) struct Route {
    context: Arc<Context>,
    way: Way,
    /// One server knows all who listen.
    standalone: bool,
}

enum Way {
    One { node: Arc<Node>, source: Topology },
    Cluster(Cluster),
}

impl Route {
    pub(crate) async fn connect(topology: Topology, context: Arc<Context>) -> Result<Self> {
        let standalone = matches!(topology, Topology::Standalone(_));
        let way = match topology {
            Topology::Cluster(seeds) => Way::Cluster(Cluster::connect(seeds, Arc::clone(&context)).await?),
            one => {
                let node = Node::connect(source(&one), Arc::clone(&context)).await?;
                Way::One { node, source: one }
            }
        };
        Ok(Self { context, way, standalone })
    }

    /// Returns whether publishing tells who listens. Behind a proxy that spreads keys a message is published on
    /// another server than the one with the subscription, so a probe must have shown that there is one server.
    pub(crate) fn is_standalone(&self) -> bool {
        self.standalone && self.context.spread.is_one_server()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.way, Way::Cluster(_))
    }

    /// Runs a script where its mutex is; an error reply is an error.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipe)> {
        let answered = match &self.way {
            Way::One { node, .. } => node.invoke(call).await,
            // Boxed: with redirects it is larger than all the rest of a call, which most have no use for.
            Way::Cluster(cluster) => Box::pin(cluster.invoke(call)).await,
        };
        match answered? {
            (Reply::Error(words), _) => Err(error::refused(&words).with_mutex(call.mutex)),
            answered => Ok(answered),
        }
    }

    /// Sends a call whose reply nobody waits for, if there is a connection.
    pub(crate) fn send(&self, call: &Invocation<'_>) {
        match &self.way {
            Way::One { node, .. } => {
                if let Some(pipe) = node.pipe_now() {
                    let _ = pipe.send(|out| call.write(out, &self.context.scripts));
                }
            }
            Way::Cluster(cluster) => cluster.send(call),
        }
    }

    /// Every server that has mutexes.
    pub(crate) fn masters(&self) -> Vec<Arc<Node>> {
        match &self.way {
            Way::One { node, .. } => vec![Arc::clone(node)],
            Way::Cluster(cluster) => cluster.masters(),
        }
    }

    /// A connection of its own, for subscriptions.
    pub(crate) async fn listen(&self) -> Result<Wire> {
        let (settings, clock) = (&self.context.settings, &*self.context.clock);
        match &self.way {
            Way::One { source: Topology::Standalone(address), .. } => {
                Wire::open(address, settings, &settings.login, clock).await
            }
            Way::One { source: Topology::Sentinel { sentinels, master }, .. } => {
                let sentinel = Sentinel { sentinels: sentinels.clone(), master: master.clone() };
                sentinel.connect(&self.context).await.map(|(wire, _)| wire)
            }
            Way::One { .. } => Err(error::gone()),
            Way::Cluster(cluster) => cluster.any().await,
        }
    }

    pub(crate) fn close(&self) {
        match &self.way {
            Way::One { node, .. } => node.close(),
            Way::Cluster(cluster) => cluster.close(),
        }
    }
}

fn source(topology: &Topology) -> Source {
    match topology {
        Topology::Standalone(address) => Source::Fixed(address.clone()),
        Topology::Sentinel { sentinels, master } => {
            Source::Sentinel(Sentinel { sentinels: sentinels.clone(), master: master.clone() })
        }
        Topology::Cluster(seeds) => {
            Source::Fixed(seeds.first().cloned().unwrap_or_else(|| Address::tcp("localhost", 6379)))
        }
    }
}
