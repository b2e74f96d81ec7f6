//! Routing of calls to the server that has the mutex.

use std::sync::Arc;

use simba_core::Result;

use crate::cluster::Cluster;
use crate::config::Topology;
use crate::connection::Connection;
use crate::error;
use crate::pipeline::Pipeline;
use crate::resp::Reply;
use crate::scripts::Invocation;
use crate::sentinel::Sentinel;
use crate::supervisor::{Context, Node, Source, Via};

pub(crate) struct Route {
    context: Arc<Context>,
    target: Target,
}

enum Target {
    One { source: Source, main: Arc<Node>, acquisitions: Option<Arc<Node>> },
    Cluster(Cluster),
}

impl Route {
    pub(crate) async fn connect(topology: Topology, context: Arc<Context>) -> Result<Self> {
        let source = match topology {
            Topology::Cluster(seeds) => {
                let target = Target::Cluster(Cluster::connect(seeds, Arc::clone(&context)).await?);
                return Ok(Self { context, target });
            }
            Topology::Standalone(address) => Source::Fixed(address),
            Topology::Sentinel { sentinels, master } => Source::Sentinel(Sentinel { sentinels, master }),
        };
        let start = |via| Node::start(source.clone(), Arc::clone(&context), via);
        let main = start(Via::Main);
        main.connected().await?;
        let acquisitions = context.settings.wait.map(|_| start(Via::Acquisitions));
        Ok(Self { target: Target::One { source, main, acquisitions }, context })
    }

    /// Returns whether the result of `PUBLISH` shows which waiters have subscribed. A proxy that spreads keys publishes
    /// a message on another server than the one with the subscription, so a probe must have shown that there is one
    /// server.
    pub(crate) fn is_standalone(&self) -> bool {
        let one_address = matches!(&self.target, Target::One { source: Source::Fixed(_), .. });
        one_address && self.context.spread.is_one_server()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.target, Target::Cluster(_))
    }

    /// Runs a script on the server that has the mutex. Fails on an error reply.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipeline)> {
        let result = match &self.target {
            Target::One { main, acquisitions, .. } => pick(main, acquisitions, call.via).invoke(call).await,
            // Boxed: the future that follows redirects is larger than the rest of a call, and only clusters need it.
            Target::Cluster(cluster) => Box::pin(cluster.invoke(call)).await,
        };
        match result? {
            (Reply::Error(message), _) => Err(error::refused(&message).with_mutex(call.mutex)),
            result => Ok(result),
        }
    }

    /// Sends a call and ignores its reply. Does nothing without a connection.
    pub(crate) fn send(&self, call: &Invocation<'_>) {
        match &self.target {
            Target::One { main, acquisitions, .. } => pick(main, acquisitions, call.via).send(call),
            Target::Cluster(cluster) => cluster.send(call),
        }
    }

    /// Returns every server that has mutexes.
    pub(crate) fn masters(&self) -> Vec<Arc<Node>> {
        match &self.target {
            Target::One { main, .. } => vec![Arc::clone(main)],
            Target::Cluster(cluster) => cluster.masters(),
        }
    }

    /// Opens a connection for subscriptions.
    pub(crate) async fn connect_subscriber(&self) -> Result<Connection> {
        match &self.target {
            Target::One { source, .. } => {
                source.connect(&self.context).await.map(|(connection, _)| connection)
            }
            Target::Cluster(cluster) => cluster.connect_any().await,
        }
    }

    pub(crate) fn close(&self) {
        match &self.target {
            Target::One { main, acquisitions, .. } => {
                std::iter::once(main).chain(acquisitions).for_each(|node| node.close(error::closed()));
            }
            Target::Cluster(cluster) => cluster.close(),
        }
    }
}

fn pick<'a>(main: &'a Node, acquisitions: &'a Option<Arc<Node>>, via: Via) -> &'a Node {
    acquisitions.as_deref().filter(|_| via == Via::Acquisitions).unwrap_or(main)
}
