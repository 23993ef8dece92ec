//! The planner: scenes and their rounds as text, properties over random schedules, errors, and time to plan.

mod device;
mod errors;
mod fair;
mod overlap;
mod scenes;
mod schedules;
mod speed;
