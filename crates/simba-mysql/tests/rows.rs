//! The fault rows about the network, on the shared MariaDB and MySQL.

mod common;

mod on_mariadb {
    simba_tck::rows!(crate::common::MySql::shared());
}

mod on_mysql {
    simba_tck::rows!(crate::common::Product::MySql.fixture());
}
