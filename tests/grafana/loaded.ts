// What Grafana's own types say of a dashboard as it stands in a file. Each dashboard is assigned to Loaded.
import type { AnnotationQuery, Dashboard, FieldConfig, Panel, RowPanel, VariableModel } from "@grafana/schema";
import type * as BarGauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as Heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as StateTimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as StatusHistory from "@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen";
import type * as Table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as TimeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// A file has the words of an enumeration, not its members, and leaves out what has a default.
type Word<T> = T extends string ? `${T}` : T;
type Plain<T> = T extends string | number | boolean | null | undefined
  ? Word<T>
  : T extends (infer Each)[]
    ? Plain<Each>[]
    : { [Key in keyof T]: Plain<T[Key]> };
type Some<T> = T extends object ? (T extends unknown[] ? T : { [Key in keyof T]?: Some<T[Key]> }) : T;

type Of<Type extends string, Options, Custom> = Omit<Plain<Panel>, "type" | "options" | "fieldConfig"> & {
  type: Type;
  options: Some<Plain<Options>>;
  fieldConfig: {
    defaults: Omit<Plain<FieldConfig>, "custom" | "links"> & { custom: Some<Plain<Custom>>; links?: Link[] };
    overrides: { matcher: { id: string; options?: unknown }; properties: { id: string; value?: unknown }[] }[];
  };
};
type Link = { title: string; url: string; targetBlank?: boolean };

type AnyPanel =
  | Of<"timeseries", TimeSeries.Options, TimeSeries.FieldConfig>
  | Of<"heatmap", Heatmap.Options, Heatmap.FieldConfig>
  | Of<"status-history", StatusHistory.Options, StatusHistory.FieldConfig>
  | Of<"state-timeline", StateTimeline.Options, StateTimeline.FieldConfig>
  | Of<"stat", Stat.Options, object>
  | Of<"bargauge", BarGauge.Options, object>
  | Of<"table", Table.Options, Table.FieldConfig>
  | (Omit<Plain<RowPanel>, "type"> & { type: "row" });

// What a data source adds to a variable or an annotation is not in the types; these are Prometheus'.
export type Loaded = Omit<Plain<Dashboard>, "panels" | "templating" | "annotations"> & {
  panels: AnyPanel[];
  templating: { list: (Plain<VariableModel> & { definition?: string })[] };
  annotations: {
    list: (Plain<AnnotationQuery> & { expr: string; step: string; titleFormat: string; textFormat: string })[];
  };
};
